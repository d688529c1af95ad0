"""Full-text indexes: a file of SQLite, OpenSearch and Solr, and what of a document they hold."""
