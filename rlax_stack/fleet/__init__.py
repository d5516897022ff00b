"""Fleet: coordinator, ledger, parameter server and runtimes."""
