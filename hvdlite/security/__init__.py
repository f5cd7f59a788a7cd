"""Proofs and signatures: the job's secret, the handshake, signed frames and pickles, CURVE for ZeroMQ."""
