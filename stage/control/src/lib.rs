//! The stage configuration file and the gRPC control service, shared by stages, the command line and the operator.
