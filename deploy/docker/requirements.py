"""Prints what Telamon and some of its extras require, one per line: python requirements.py EXTRA[,EXTRA...].

Lets an image install them in a layer of their own, before the code is there. Reads pyproject.toml of this folder.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(r for name in sys.argv[1].split(",") for r in extras[name]), sep="\n")  # noqa: T201 its output is what it is for
