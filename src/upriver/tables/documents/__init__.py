"""Documents as rows of a table: JSON values into columns and back, and what their fields are like."""

from upriver.tables.documents.comparing import matches
from upriver.tables.documents.field_report import FieldReport
from upriver.tables.documents.parsing import CODEC, Parsed, parse
from upriver.tables.documents.rebuilding import conform, documents_of

__all__ = ["CODEC", "FieldReport", "Parsed", "conform", "documents_of", "matches", "parse"]
