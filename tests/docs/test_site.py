"""The site can be built, and no page points to one that is not there."""

import subprocess
import sys
from pathlib import Path

from tests.support.page_snippets import ROOT


def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    shown = (tmp_path / "index.html").read_text()
    for page in pages:
        name = "protocol/index.html" if page.name == "README.html" else str(page)
        assert (tmp_path / name).exists(), name
        assert f'href="{name}"' in shown or name == "index.html", f"{name} is in no menu"
