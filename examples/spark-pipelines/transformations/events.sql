CREATE MATERIALIZED VIEW events AS
SELECT vbucket, event, count(*) AS changes
FROM changes
GROUP BY vbucket, event
