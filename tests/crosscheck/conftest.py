def pytest_addoption(parser):
    parser.addoption("--expect", default="",
                     help="libraries, with commas between their names, that must be there: one "
                     "that is missing fails instead of being skipped")
