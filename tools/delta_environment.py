"""Make a virtual environment that has Spark with Delta: ``python -m tools.delta_environment [DIRECTORY]``.

Delta has no release for the Spark that Upriver uses, so Spark with Delta runs in an environment of its own. Slow tests
read our tables with it and write to them, and ``python -m bench.targets`` compares with it. pip installs delta-spark
and the Spark that it was made for; Maven fetches the jars. Afterwards nothing needs a network: a program gives all
files of ``jars`` in the environment to Spark as ``spark.jars``.
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Where tests and benchmarks look for it, unless UPRIVER_DELTA_PYTHON names a Python elsewhere.
DIRECTORY = ROOT / "build" / "delta-environment"
DELTA = "4.4.0"
#: delta-spark chooses the version of Spark.
PACKAGES = (f"delta-spark=={DELTA}", "numpy", "pandas<3", "pyarrow")
#: The jar is named after the versions of Spark and Scala. Spark has everything else that Delta needs.
ARTIFACT = "delta-spark_4.2_2.13"
GROUPS = "io.delta,io.unitycatalog"
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>upriver</groupId><artifactId>delta-jars</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>io.delta</groupId><artifactId>{ARTIFACT}</artifactId><version>{DELTA}</version></dependency>
  </dependencies>
</project>
"""


def delta_python() -> Path | None:
    """The Python of the environment; None if it was not made."""
    named = os.environ.get("UPRIVER_DELTA_PYTHON")
    python = DIRECTORY / "bin" / "python" if named is None else Path(named)
    return python if python.exists() else None


def make(directory: Path) -> None:
    """Make the environment, or complete it."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)
    fetch_jars(directory / "jars")


def fetch_jars(jars: Path) -> None:
    """Fetch Delta and what it needs besides Spark."""
    if list(jars.glob(f"{ARTIFACT}-{DELTA}.jar")):
        return
    maven = shutil.which("mvn")
    if maven is None:
        sys.exit("Maven is missing: install it (mvn) to fetch the jars of Delta")
    project = jars.with_name("maven")
    project.mkdir(exist_ok=True)
    (project / "pom.xml").write_text(POM)
    command = [maven, "-q", "-B", "-f", str(project / "pom.xml"), f"-Dmaven.repo.local={project / 'repository'}"]
    command += ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DincludeGroupIds={GROUPS}"]
    subprocess.run([*command, f"-DoutputDirectory={jars}"], check=True)
    shutil.rmtree(project)


def main() -> None:
    """Make the environment, and print its Python."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    directory: Path = parser.parse_args().directory.absolute()
    make(directory)
    print(f"UPRIVER_DELTA_PYTHON={directory / 'bin' / 'python'}")


if __name__ == "__main__":
    main()
