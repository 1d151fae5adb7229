def pytest_addoption(parser):
    parser.addoption("--expect", default="", help="libraries, with commas, that must be there")


def pytest_collection_modifyitems(config):
    for name in filter(None, config.getoption("--expect").split(",")):
        __import__(name)
