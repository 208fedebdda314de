"""What several compressors are made of: base classes, codings of positions and values, parts of algorithms."""
