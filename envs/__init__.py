"""Environment servers over ZeroMQ, their client, and the bundled environments."""
