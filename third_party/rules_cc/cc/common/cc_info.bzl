"""CcInfo under rules_cc's label."""

load(":builtin.bzl", "BuiltinCcInfo")

CcInfo = BuiltinCcInfo
