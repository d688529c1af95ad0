from upriver.engine.storage.interface import Batch, Block


def test_a_batch_is_true_if_it_changes_something() -> None:
    assert not Batch()
    for batch in (
        Batch(trims={1: 0}),
        Batch(removed=[(1, 2)]),
        Batch(blocks=[Block(1, 2, b"")]),
        Batch(group=(1, b"")),
        Batch(drop_groups_to=1),
        Batch(descriptions={1: None}),
        Batch(facts={"clean": True}),
    ):
        assert batch
