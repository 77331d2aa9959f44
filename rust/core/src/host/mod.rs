//! The host backend: a Rust kernel for every kernel id, on the same parameter structs, with the same numbers.
//! One file per op; `params!` binds them to the structs in `ops/`.
