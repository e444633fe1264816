"""Build settings that the command line can set."""

def _flag_impl(_ctx):
    return []

bool_flag = rule(
    implementation = _flag_impl,
    build_setting = config.bool(flag = True),
)
