"""The checkpoint dialects of other libraries, one file each, for q4core."""
