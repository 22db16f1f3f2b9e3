//! Model facts and devices in, a plan of stages out. Pure.
