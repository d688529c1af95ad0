"""Files of a table, in a local directory and in an object store."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.killed_process import each_kill
from tests.support.object_store import ObjectStore, object_store
from upriver.errors import StorageError
from upriver.tables.storage import TableStorage, storage_options

__all__ = ["object_store"]

RACES = 10


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> TableStorage:
    if request.param == "local":
        return TableStorage.of(tmp_path / "table")
    store: ObjectStore = request.getfixturevalue("object_store")
    return store.new_storage()


def names(storage: TableStorage, prefix: str = "", after: str = "") -> list[str]:
    return sorted(file.path for file in storage.list(prefix, after))


def test_write_and_read(storage: TableStorage) -> None:
    storage.write("a/b.bin", b"0123456789")
    assert storage.read("a/b.bin") == b"0123456789"
    assert storage.read("a/b.bin", 3) == b"3456789"
    assert storage.read("a/b.bin", 3, 4) == b"3456"
    assert storage.size("a/b.bin") == 10
    assert storage.stat("a/b.bin").modified > 1e9
    storage.write("a/b.bin", b"new")
    assert storage.read("a/b.bin") == b"new"


def test_a_missing_file(storage: TableStorage, tmp_path: Path) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: storage.read("nothing"),
        lambda: storage.read("nothing", 1, 2),
        lambda: storage.stat("nothing"),
        lambda: storage.open("nothing"),
    ]
    for attempt in attempts:
        with pytest.raises(FileNotFoundError):
            attempt()
    if storage.local() is None:
        with pytest.raises(FileNotFoundError):
            storage.fetched("nothing", tmp_path / "cache")
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_reader_can_seek(storage: TableStorage) -> None:
    content = bytes(range(256)) * 1000
    storage.write("x", content)
    with storage.open("x") as file:
        assert file.seek(-8, 2) == len(content) - 8
        assert file.read() == content[-8:]
        assert file.seek(1000) == 1000
        assert file.read(200_000) == content[1000:201_000]
        assert file.tell() == 201_000
        assert file.read(1_000_000) == content[201_000:]
        assert file.read(1) == b""


def test_put_if_absent(storage: TableStorage) -> None:
    assert storage.put_if_absent("log/0.json", b"first")
    assert not storage.put_if_absent("log/0.json", b"second")
    assert storage.read("log/0.json") == b"first"
    assert names(storage) == ["log/0.json"]


def test_a_race_has_one_winner(storage: TableStorage) -> None:
    for number in range(RACES):
        barrier = threading.Barrier(2)
        won: dict[bytes, bool] = {}

        def put(
            who: bytes, number: int = number, barrier: threading.Barrier = barrier, won: dict[bytes, bool] = won
        ) -> None:
            barrier.wait()
            won[who] = storage.put_if_absent(f"{number}.json", who)

        threads = [threading.Thread(target=put, args=(who,)) for who in (b"a", b"b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [who for who, success in won.items() if success]
        assert storage.read(f"{number}.json") == winner


def test_lists(storage: TableStorage) -> None:
    assert names(storage) == names(storage, "log/") == []
    for path in ("log/1", "log/2", "log/sub/3", "logs/4", "5"):
        storage.write(path, b"x")
    assert names(storage) == ["5", "log/1", "log/2", "log/sub/3", "logs/4"]
    assert names(storage, "log/") == ["log/1", "log/2", "log/sub/3"]
    assert names(storage, "log/", after="log/1") == ["log/2", "log/sub/3"]
    assert {file.size for file in storage.list()} == {1}


def test_delete(storage: TableStorage) -> None:
    storage.write("a", b"x")
    storage.write("b/c", b"x")
    storage.delete(["a", "nothing", "b/c"])
    storage.delete([])
    assert names(storage) == []


def test_a_new_file_appears_when_it_is_complete(storage: TableStorage) -> None:
    with storage.new_file("a/b.parquet") as path:
        path.write_bytes(b"12345")
        assert "a/b.parquet" not in names(storage)
    assert storage.read("a/b.parquet") == b"12345"
    assert names(storage) == ["a/b.parquet"]


def test_an_abandoned_file_leaves_nothing(storage: TableStorage) -> None:
    def write() -> None:
        with storage.new_file("a/b.parquet") as path:
            path.write_bytes(b"12345")
            raise KeyError("why")

    with pytest.raises(KeyError):
        write()
    assert names(storage) == []


def test_a_fetched_file(storage: TableStorage, tmp_path: Path) -> None:
    storage.write("a/b", b"12345")
    path = storage.fetched("a/b", tmp_path / "cache")
    assert path.read_bytes() == b"12345"
    assert path == storage.fetched("a/b", tmp_path / "cache")
    assert (path == storage.local("a/b")) == (storage.local() is not None)


def test_a_new_file_stays_in_the_cache(object_store: ObjectStore, tmp_path: Path) -> None:
    storage, cache = object_store.new_storage(), tmp_path / "cache"
    with storage.new_file("a/b", cache=cache) as file:
        file.write_bytes(b"12345")
    assert storage.read("a/b") == b"12345"
    storage.delete(["a/b"])
    assert storage.fetched("a/b", cache).read_bytes() == b"12345"

    def fail() -> None:
        with storage.new_file("c", cache=cache) as unfinished:
            unfinished.write_bytes(b"1")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["b"]


def test_tasks_get_the_same_storage(storage: TableStorage) -> None:
    storage.write("a", b"x")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.read("a") == b"x"
    assert "secret" not in repr(storage)


def test_two_caches_of_tables_do_not_mix(object_store: ObjectStore, tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        storage = object_store.new_storage()
        storage.write("same", content)
        assert storage.fetched("same", tmp_path).read_bytes() == content


@pytest.mark.parametrize("url", ["hdfs://host/path", "HDFS:/path", "ftp://host/x", "https://host/x", "dbfs:/x"])
def test_other_schemes_are_refused_by_name(url: str) -> None:
    with pytest.raises(StorageError, match=rf"cannot be stored at {url.split(':')[0].lower()}:// addresses"):
        TableStorage.of(url)


def test_ways_to_write_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for where in (tmp_path / "a b", f"file://{tmp_path}/a%20b", f"file:{tmp_path}/a%20b", "a b", "./x/../a b"):
        assert TableStorage.of(where).local() == tmp_path / "a b"


def test_s3a_is_s3(object_store: ObjectStore) -> None:
    assert TableStorage.of("s3a://tables/x/", object_store.options).url == "s3://tables/x"


def test_an_unknown_option_of_an_object_store(object_store: ObjectStore) -> None:
    with pytest.raises(StorageError, match="nonsense"):
        TableStorage.of("s3://tables/x", {**object_store.options, "nonsense": "1"})


def test_a_bucket_that_does_not_exist(object_store: ObjectStore) -> None:
    with pytest.raises(StorageError, match="missing-bucket"):
        list(TableStorage.of("s3://missing-bucket/x", object_store.options).list())


def test_a_local_error_names_the_file(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    storage.write("file", b"x")
    with pytest.raises(StorageError, match="file/below"):
        storage.write("file/below", b"x")
    with pytest.raises(StorageError, match="directory"):
        storage.read("")


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    for number in each_kill(lambda: storage.write("a", b"new")):
        assert names(storage, after="_") == ([] if number < 2 else ["a"])
        storage.delete(["a"])


def test_a_kill_leaves_a_put_or_none(tmp_path: Path) -> None:
    storage = TableStorage.of(tmp_path)
    for number in each_kill(lambda: storage.put_if_absent("a", b"new")):
        assert names(storage, after="_") == ([] if number < 2 else ["a"])
        storage.delete(["a"])


def test_options_of_object_stores_are_read() -> None:
    assert storage_options("") == {}
    assert storage_options("aws_region = eu-west-1, aws_endpoint=http://a:1/?b=c") == {
        "aws_region": "eu-west-1",
        "aws_endpoint": "http://a:1/?b=c",
    }
    for wrong in ("region", "=x", "a=1,b"):
        with pytest.raises(ValueError, match="options such as"):
            storage_options(wrong)
