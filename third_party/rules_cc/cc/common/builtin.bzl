"""A global cannot be rebound to its own name in one file: hence two files."""

BuiltinCcInfo = CcInfo
