"""The rows, one file each; every module here is imported when rows are listed, so none imports its package on top."""
