"""What pipelines keep current: tables, search indexes and caches."""
