"""How a text's statements are declared."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that a text says, in our words."""

    name: str  #: unique inside its text
    says: str
    difference: str = ""  #: why Upriver deliberately does something else


@dataclass(frozen=True, slots=True)
class Text:
    """One protocol text."""

    name: str  #: of the dialect
    title: str
    sections: dict[str, tuple[Statement, ...]]

    def __iter__(self) -> Iterator[tuple[str, Statement]]:
        """Every statement with the id that tests use."""
        for statements in self.sections.values():
            for statement in statements:
                yield f"{self.name}:{statement.name}", statement


@dataclass(frozen=True, slots=True)
class OpenIssue:
    """One item of the second draft's list of open issues."""

    name: str
    number: str  #: in the tracker of the text's authors; empty if it has none
    asks: str
    became: str  #: what Upriver does about it

    @property
    def id(self) -> str:
        """What tests call it."""
        return f"open_issues:{self.name}"
