"""The engine behind a socket: OpenAI's HTTP, JetStream's gRPC wire, metrics, an engine for JetStream's driver."""
