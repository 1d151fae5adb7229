def pytest_collection_modifyitems(config):
    for name in filter(None, config.getoption("--expect").split(",")):
        __import__(name)
