struct Model;

#[kolo::function]
fn load(_path: String) -> Model {
    Model
}

#[kolo::function]
fn try_load(_path: String) -> Result<Model, String> {
    Ok(Model)
}

fn main() {}
