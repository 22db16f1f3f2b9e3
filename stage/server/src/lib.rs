//! The stage process: engine, links, scheduler, API and control service wired together.
