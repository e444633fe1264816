"""sh_test under rules_shell's label."""

def sh_test(**kwargs):
    native.sh_test(**kwargs)
