#[kolo::main]
async fn start() {}
