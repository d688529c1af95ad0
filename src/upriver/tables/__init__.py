"""Delta tables of the latest state: log, deletion vectors, data files, key indexes, compaction and reading.

Needs neither Spark nor a node. Modules are imported on first use.
"""

from typing import TYPE_CHECKING

from upriver.late_imports import late_imports

if TYPE_CHECKING:
    from upriver.tables.actions import Add, DeletionVector
    from upriver.tables.compaction import PATIENCE, Merged, carried, choose, merge, merge_plain, rewrite
    from upriver.tables.data_files import DataFileWriter, NewFile, PartResult, UnwritableRows
    from upriver.tables.deletion_vectors import HIDDEN, read_vector
    from upriver.tables.documents import FieldReport, Parsed, conform, documents_of, matches, parse
    from upriver.tables.key_index import NO_VBUCKET, KeyIndex
    from upriver.tables.locating import locate
    from upriver.tables.log import LOG, Commit, TableSnapshot
    from upriver.tables.part_writer import PartWriter
    from upriver.tables.reading import arrow_schema, read, read_rows
    from upriver.tables.row_comparison import RowComparison, rows_of_vbuckets
    from upriver.tables.schema import OWN, SHARE, Column, TableSchema
    from upriver.tables.storage import StoredFile, TableStorage, storage_options
    from upriver.tables.table import ChangedRows, Edit, Table, files_expected, require_files
    from upriver.tables.vacuum import Vacuumed, vacuum_table

__all__ = [
    "HIDDEN",
    "LOG",
    "NO_VBUCKET",
    "OWN",
    "PATIENCE",
    "SHARE",
    "Add",
    "ChangedRows",
    "Column",
    "Commit",
    "DataFileWriter",
    "DeletionVector",
    "Edit",
    "FieldReport",
    "KeyIndex",
    "Merged",
    "NewFile",
    "Parsed",
    "PartResult",
    "PartWriter",
    "RowComparison",
    "StoredFile",
    "Table",
    "TableSchema",
    "TableSnapshot",
    "TableStorage",
    "UnwritableRows",
    "Vacuumed",
    "arrow_schema",
    "carried",
    "choose",
    "conform",
    "documents_of",
    "files_expected",
    "locate",
    "matches",
    "merge",
    "merge_plain",
    "parse",
    "read",
    "read_rows",
    "read_vector",
    "require_files",
    "rewrite",
    "rows_of_vbuckets",
    "storage_options",
    "vacuum_table",
]

__getattr__ = late_imports(
    __name__,
    actions="Add DeletionVector",
    compaction="PATIENCE Merged carried choose merge merge_plain rewrite",
    data_files="DataFileWriter NewFile PartResult UnwritableRows",
    deletion_vectors="HIDDEN read_vector",
    documents="FieldReport Parsed conform documents_of matches parse",
    key_index="NO_VBUCKET KeyIndex",
    locating="locate",
    log="LOG Commit TableSnapshot",
    part_writer="PartWriter",
    reading="arrow_schema read read_rows",
    row_comparison="RowComparison rows_of_vbuckets",
    schema="OWN SHARE Column TableSchema",
    storage="StoredFile TableStorage storage_options",
    table="ChangedRows Edit Table files_expected require_files",
    vacuum="Vacuumed vacuum_table",
)
