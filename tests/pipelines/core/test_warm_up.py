"""Which pipeline may start a query while Spark is new."""

from upriver.pipelines.core.warm_up import PATIENCE_S, WarmUp


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_others_wait_until_the_first_is_ready() -> None:
    warm_up = WarmUp(Clock())
    assert warm_up.may_start("mirror")
    assert not warm_up.may_start("index")
    warm_up.is_ready("index")  # who was not first says nothing about Spark
    assert not warm_up.may_start("index")
    warm_up.is_ready("mirror")
    assert warm_up.may_start("index")
    warm_up.gave_up("mirror")
    assert warm_up.may_start("observe")
    assert warm_up.may_start("index")


def test_a_pipeline_that_gives_up_makes_room() -> None:
    warm_up = WarmUp(Clock())
    assert warm_up.may_start("mirror")
    warm_up.gave_up("mirror")
    assert warm_up.may_start("index")
    assert not warm_up.may_start("mirror")


def test_no_pipeline_waits_for_ever() -> None:
    clock = Clock()
    warm_up = WarmUp(clock)
    assert warm_up.may_start("mirror")
    clock.now = PATIENCE_S
    assert warm_up.may_start("index")
