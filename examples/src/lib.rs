//! Complete kolo programs; each runs as it stands.
