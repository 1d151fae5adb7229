"A rule over many files is one test: it looks at all of them, and names each that breaks it."


def broken(rule, paths):
    "{name of the file: what `rule` finds in it} of those in which it finds something."
    found = {"/".join(p.parts[-2:]): rule(p) for p in paths}
    return {name: faults for name, faults in found.items() if faults}


def text(path): return path.read_text(encoding="utf-8")
