"""Tables that hold the latest state of every key: Delta and Parquet, with columns made from JSON values."""
