//! The attribute macros of kolo: main, function and executable
