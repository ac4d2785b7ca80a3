//! Every number that kolo claims, beside its peers
