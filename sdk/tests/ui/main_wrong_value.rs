#[kolo::main]
async fn main() -> Result<(), std::io::Error> {
    5
}
