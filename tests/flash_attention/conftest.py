"""The oracle of this folder can be imported by its tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
