//! The splitmodel command: up, plan, slice, chat, status.
