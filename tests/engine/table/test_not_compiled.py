"""Without its compiled parts the node does not start and says why; the client works."""

import subprocess
import sys

import pytest

from upriver.errors import NotCompiled
from upriver.node import start

TABLE, LOOP = "upriver.engine.table._table", "upriver.node._fast_path"
CODECS = [f"upriver.wire.codec.{name}" for name in ("_columns", "_frame_runs", "_tap_records")]


def run(program: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    """The program in a Python that cannot import these modules."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
    return subprocess.run([sys.executable, "-c", hide + program], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("hidden", [TABLE, LOOP])
def test_upriver_serve_says_in_one_line_what_to_install(hidden: str) -> None:
    done = run("from upriver.cli import main; main(['serve', '--port', '0'])", hidden)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert str(NotCompiled(hidden)) in line
    assert "install a C compiler" in line


@pytest.mark.parametrize("hidden", [TABLE, LOOP])
def test_an_embedded_node_raises_one_clear_error(hidden: str) -> None:
    program = (
        "import upriver.node, upriver.errors\n"
        "try:\n"
        "    upriver.node.start()\n"
        "except upriver.errors.NotCompiled as error:\n"
        "    print(error)\n"
    )
    done = run(program, hidden)
    assert (done.stdout.strip(), done.stderr, done.returncode) == (str(NotCompiled(hidden)), "", 0)


@pytest.mark.parametrize("broken", [TABLE, LOOP])
def test_a_compiled_part_that_cannot_be_loaded_is_not_called_missing(broken: str) -> None:
    """The file is there but, say, was built for another system: a C compiler would not help."""
    program = (
        "import importlib.abc, sys\n"
        "class Broken(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {broken!r}:\n"
        "            raise ImportError('undefined symbol: PyOld_Function', name=name)\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from upriver.cli import main; main(['serve', '--port', '0'])"
    )
    done = run(program)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"cannot load its compiled part {broken}: undefined symbol: PyOld_Function. Reinstall with pip" in line
    assert "compiler" not in line


def test_a_package_that_a_compiled_part_imports_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert f"cannot load its compiled part {TABLE}: No module named 'pyarrow'." in str(
        NotCompiled.after(TABLE, missing)
    )
    absent = ModuleNotFoundError(f"No module named {TABLE!r}", name=TABLE)
    assert str(NotCompiled.after(TABLE, absent)) == str(NotCompiled(TABLE))


def test_help_and_version_need_nothing_compiled() -> None:
    for arguments in (["--help"], ["serve", "--help"]):
        assert run(f"from upriver.cli import main; main({arguments})", TABLE, LOOP, *CODECS).returncode == 0
    done = run("from upriver.cli import main; main(['version'])", TABLE, LOOP, *CODECS)
    assert "compiled nothing" in done.stdout


def test_the_client_works_without_any_compiled_part() -> None:
    program = (
        "from upriver.client import Consumer, SyncKvClient\n"
        "with SyncKvClient(ADDRESS) as kv:\n"
        "    kv.set('key', b'value')\n"
        "    assert kv.get('key').value == b'value'\n"
        "with Consumer.sync(ADDRESS, name='c', end='latest') as consumer:\n"
        "    assert b'key' in [key for batch in consumer for key in batch.records['key'].to_pylist()]\n"
    )
    with start(vbuckets=4) as node:
        done = run(program.replace("ADDRESS", repr(node.address)), TABLE, LOOP, *CODECS)
    assert done.returncode == 0, done.stderr
