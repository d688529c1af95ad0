from upriver.engine.storage.interface import Block, WriteBatch


def test_a_batch_is_true_if_it_changes_something() -> None:
    assert not WriteBatch()
    for batch in (
        WriteBatch(trims={1: 0}),
        WriteBatch(removed=[(1, 2)]),
        WriteBatch(blocks=[Block(1, 2, b"")]),
        WriteBatch(group=(1, b"")),
        WriteBatch(drop_groups_to=1),
        WriteBatch(descriptions={1: None}),
        WriteBatch(facts={"clean": True}),
    ):
        assert batch
