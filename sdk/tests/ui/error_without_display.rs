struct Broken;

#[kolo::function]
fn fails() -> Result<(), Broken> {
    Err(Broken)
}

fn main() {}
