#[kolo::function]
fn generic<T>(_value: T) {}

#[kolo::function]
fn implied(_value: impl Into<u8>) {}

#[kolo::function]
fn gives() -> impl Future<Output = u8> {
    async { 5 }
}

#[kolo::function]
unsafe fn dangerous() {}

#[kolo::function]
extern "C" fn foreign() {}

#[kolo::function(name = "other")]
fn named() {}

#[kolo::function]
fn many(
    _a: u8, _b: u8, _c: u8, _d: u8, _e: u8, _f: u8, _g: u8, _h: u8, _i: u8,
    _j: u8, _k: u8, _l: u8, _m: u8, _n: u8, _o: u8, _p: u8, _q: u8,
) {
}

#[kolo::function]
struct NoFunction;

struct Type;

impl Type {
    #[kolo::function]
    fn method(&self) {}
}

fn main() {}
