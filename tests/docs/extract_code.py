"""Writes the code blocks of Markdown files that name a file.

A block that opens with ```cpp file=NAME goes to OUT/NAME, with a line directive
so that compiler errors point at the document.

usage: extract_code.py OUT FILE.md...
"""

import os
import re
import sys


def main():
    out, documents = sys.argv[1], sys.argv[2:]
    for path in documents:
        name = None
        lines = []
        for number, line in enumerate(open(path, encoding="utf-8"), start=1):
            start = re.match(r"```cpp file=(\S+)$", line.rstrip())
            if start:
                name = start.group(1)
                lines = ['#line %d "%s"\n' % (number + 1, os.path.basename(path))]
            elif name and line.startswith("```"):
                with open(os.path.join(out, name), "w", encoding="utf-8") as f:
                    f.writelines(lines)
                name = None
            elif name:
                lines.append(line)
        if name:
            sys.exit("%s: the block of %s is not closed" % (path, name))


main()
