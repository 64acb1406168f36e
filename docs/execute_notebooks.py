"""Run notebooks from the first cell to the last, and keep what they print: python docs/execute_notebooks.py FILE...

`jupyter execute` would write down when each cell ran, and every run would change the files.
"""

import sys

import nbformat
from nbclient import NotebookClient

for path in sys.argv[1:]:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    NotebookClient(notebook, timeout=600, record_timing=False).execute()
    nbformat.write(notebook, path)
