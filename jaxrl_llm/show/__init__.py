"""Looking at run folders: a summary for the terminal and one self-contained page of curves, settings and samples."""
