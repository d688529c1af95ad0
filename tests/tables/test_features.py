"""Which tables are refused, and what the error says."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.sample_tables import SCHEMA
from upriver.errors import UnsupportedTable
from upriver.tables.actions import Metadata, Protocol
from upriver.tables.features import protocol_for, require_supported, with_vectors, without_vectors

OURS = protocol_for(vectors=True)
METADATA = Metadata("id", SCHEMA.delta(), {"delta.enableDeletionVectors": "true", "delta.autoOptimize": "true"})


def refused(protocol: Protocol = OURS, metadata: Metadata = METADATA, *, writing: bool = True) -> str:
    with pytest.raises(UnsupportedTable) as caught:
        require_supported("/table", protocol, metadata, writing=writing)
    assert str(caught.value).startswith("/table: ")
    return str(caught.value)


def with_column(**column: Any) -> Metadata:
    schema = json.loads(SCHEMA.delta())
    schema["fields"].append({"name": "x", "type": "long", "nullable": True, "metadata": {}, **column})
    return replace(METADATA, schema=json.dumps(schema))


def test_our_tables() -> None:
    assert protocol_for(vectors=True) == Protocol(3, 7, ["deletionVectors"], ["deletionVectors"])
    assert protocol_for(vectors=False) == Protocol(1, 2)
    for vectors in (True, False):
        require_supported("/table", protocol_for(vectors=vectors), METADATA)


@pytest.mark.parametrize(
    ("without", "with_them"),
    [
        (Protocol(1, 2), Protocol(3, 7, ["deletionVectors"], ["appendOnly", "deletionVectors", "invariants"])),
        (
            Protocol(1, 7, None, ["checkConstraints"]),
            Protocol(3, 7, ["deletionVectors"], ["checkConstraints", "deletionVectors"]),
        ),
        (
            Protocol(3, 7, ["columnMapping"], ["columnMapping"]),
            Protocol(3, 7, ["columnMapping", "deletionVectors"], ["columnMapping", "deletionVectors"]),
        ),
    ],
)
def test_vectors_are_switched_on_and_off(without: Protocol, with_them: Protocol) -> None:
    """Nothing else that the table has is lost, except for rules that nothing uses."""
    assert with_vectors(without) == with_vectors(with_them) == with_them
    back = without_vectors(with_them)
    assert back == (without if without.writer == 7 else Protocol(1, 7, None, ["appendOnly", "invariants"]))
    assert without_vectors(OURS) == protocol_for(vectors=False)


@pytest.mark.parametrize("protocol", [Protocol(1, 1), Protocol(1, 4), Protocol(2, 5), Protocol(2, 6)])
def test_features_that_a_version_implies_and_nothing_uses(protocol: Protocol) -> None:
    require_supported("/table", protocol, METADATA)
    listed = ["appendOnly", "changeDataFeed", "checkConstraints", "columnMapping", "deletionVectors", "invariants"]
    require_supported("/table", Protocol(3, 7, ["columnMapping", "deletionVectors"], listed), METADATA)


@pytest.mark.parametrize(
    "feature",
    [
        "rowTracking",
        "inCommitTimestamp",
        "v2Checkpoint",
        "typeWidening",
        "domainMetadata",
        "clustering",
        "somethingNew",
    ],
)
def test_features_that_bind_writers(feature: str) -> None:
    protocol = Protocol(3, 7, ["deletionVectors"], ["deletionVectors", feature])
    assert f"{feature} (ALTER TABLE … DROP FEATURE {feature})" in refused(protocol)
    require_supported("/table", protocol, METADATA, writing=False)


@pytest.mark.parametrize("feature", ["v2Checkpoint", "typeWidening", "variantType"])
def test_features_that_bind_readers(feature: str) -> None:
    assert feature in refused(Protocol(3, 7, ["deletionVectors", feature], ["deletionVectors", feature]), writing=False)


def test_later_versions() -> None:
    assert "protocol versions 4 and 7" in refused(Protocol(4, 7), writing=False)
    assert "protocol versions 3 and 8" in refused(Protocol(3, 8))


@pytest.mark.parametrize(
    ("name", "value"),
    [("delta.appendOnly", "true"), ("delta.enableChangeDataFeed", "TRUE"), ("delta.columnMapping.mode", "name")],
)
def test_properties_that_switch_a_feature_on(name: str, value: str) -> None:
    found = refused(metadata=replace(METADATA, properties={name: value}))
    assert f"{name} = {value} (ALTER TABLE … SET TBLPROPERTIES" in found


def test_rules_for_writers() -> None:
    found = refused(metadata=replace(METADATA, properties={"delta.constraints.positive": "n > 0"}))
    assert "DROP CONSTRAINT positive" in found
    name = "delta.setTransactionRetentionDuration"
    assert f"UNSET TBLPROPERTIES ('{name}')" in refused(metadata=replace(METADATA, properties={name: "interval 1 day"}))
    assert "NOT NULL of the column x" in refused(metadata=with_column(nullable=False))
    for key, what in (
        ("delta.invariants", "an invariant"),
        ("delta.generationExpression", "a generated value"),
        ("delta.identity.start", "an identity"),
    ):
        assert f"{what} of the column x" in refused(metadata=with_column(metadata={key: 1}))


def test_partitions() -> None:
    assert "partitions by a, b" in refused(metadata=replace(METADATA, partition_columns=["a", "b"]))


def test_one_error_names_everything() -> None:
    found = refused(
        Protocol(3, 7, [], ["rowTracking", "domainMetadata"]),
        replace(METADATA, properties={"delta.appendOnly": "true"}),
    )
    assert all(name in found for name in ("rowTracking", "domainMetadata", "delta.appendOnly"))
    assert found.endswith("Undo this, or build a new table")
