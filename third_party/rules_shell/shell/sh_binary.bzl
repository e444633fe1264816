"""sh_binary under rules_shell's label."""

def sh_binary(**kwargs):
    native.sh_binary(**kwargs)
