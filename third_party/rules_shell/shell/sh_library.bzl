"""sh_library under rules_shell's label."""

def sh_library(**kwargs):
    native.sh_library(**kwargs)
