"""Full-text indexes: a SQLite file, OpenSearch and Solr, and the text that they index."""
