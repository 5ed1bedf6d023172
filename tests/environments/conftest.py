"""Worker processes must be able to import the environments of these tests."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
