"""Data files of tables: writing them in row groups, and reading them in pieces."""

from upriver.tables.data_files.data_file import DataFileWriter, NewFile
from upriver.tables.data_files.part_result import PartResult
from upriver.tables.data_files.unwritable_rows import UnwritableRows

__all__ = ["DataFileWriter", "NewFile", "PartResult", "UnwritableRows"]
