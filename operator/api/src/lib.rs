//! The SplitModel resource: types, defaults, validation rules and CRD generation. No I/O.
