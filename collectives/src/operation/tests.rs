//! Of operations in words, and what is refused.

use super::*;

#[test]
fn which_type_allows_which_operator() {
    use DType as D;
    use ReduceOp as R;
    let allowed = |op: R| -> Vec<D> {
        D::ALL
            .into_iter()
            .filter(|dtype| op.check(*dtype, 4).is_ok())
            .collect()
    };
    let integers = [D::U8, D::I8, D::U16, D::I16, D::I32, D::I64, D::U32, D::U64];
    let floats = [D::F16, D::F32, D::F64, D::Bf16];
    for dtype in D::ALL {
        assert_eq!(dtype.is_integer(), integers.contains(&dtype));
        assert_eq!(dtype.is_float(), floats.contains(&dtype));
    }
    for op in [R::Sum, R::Average, R::Product] {
        assert_eq!(allowed(op).len(), 12, "{op}");
        assert!(!op.allows(D::Bool));
    }
    for op in [R::Min, R::Max] {
        assert_eq!(allowed(op), D::ALL);
    }
    for op in [R::BitAnd, R::BitOr, R::BitXor] {
        assert!(allowed(op).iter().all(|dtype| !dtype.is_float()));
        assert_eq!(allowed(op).len(), 9, "{op}");
    }
    assert_eq!(allowed(R::Adasum), [D::F16, D::F32, D::F64]);
}

#[test]
fn what_is_refused_says_what_is_allowed() {
    let refused = |op: ReduceOp, dtype, world| op.check(dtype, world).unwrap_err().to_string();
    assert_eq!(
        refused(ReduceOp::Sum, DType::Bool, 2),
        "sum of bool is not defined; bool allows min, max, bit_and, bit_or, bit_xor"
    );
    assert_eq!(
        refused(ReduceOp::BitXor, DType::Bf16, 2),
        "bit_xor of bf16 is not defined; bf16 allows average, sum, min, max, product"
    );
    assert_eq!(
        refused(ReduceOp::Adasum, DType::F32, 6),
        "adasum in a world of 6: it needs a power of two of ranks (such as 8); sum and average take any number"
    );
    assert!(ReduceOp::Adasum.check(DType::F32, 1).is_ok());
    let scaled = Operation {
        reduce: Some(ReduceOp::Max),
        postscale: Factor::new(2.0),
        ..Operation::new(OperationKind::AllReduce, Some(DType::Bool), 3)
    };
    assert_eq!(
        scaled.check(2).unwrap_err().to_string(),
        "a scale factor for bool: only numbers can be scaled; leave it at 1"
    );
}

#[test]
fn an_operation_reads_like_a_call() {
    let mut operation = Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::F32), 10)
    };
    assert_eq!(operation.to_string(), "all_reduce(sum) of 10 f32");
    let rows = |rows| Operation { rows, ..operation }.to_string();
    assert_eq!(rows(3), "all_reduce(sum) of 10 f32 in 3 buffers");
    assert_eq!(
        rows(Operation::OF_SHARED_BUFFER),
        "all_reduce(sum) of 10 f32 in a shared buffer"
    );
    operation.prescale = Factor::new(0.5);
    operation.wire = Some(DType::F16);
    assert_eq!(
        operation.to_string(),
        "all_reduce(sum) of 10 f32, prescale 0.5, sent as f16"
    );
    let operation = Operation {
        reduce: Some(ReduceOp::Max),
        root: Some(3),
        ..Operation::new(OperationKind::Reduce, Some(DType::I8), 2)
    };
    assert_eq!(operation.to_string(), "reduce(max) of 2 i8 to root 3");
    let counts = Operation::new(OperationKind::AllGatherCounts, Some(DType::F16), 3);
    assert_eq!(counts.to_string(), "all_gather_varcount f16 in 3 buffers");
    let barrier = Operation::new(OperationKind::Barrier, None, 0);
    assert_eq!(barrier.to_string(), "barrier");
}

/// Makes an operation another one.
type Change = fn(&mut Operation);

#[test]
fn what_peers_say_is_looked_at_before_it_is_done() {
    let all_reduce = Operation {
        reduce: Some(ReduceOp::Sum),
        ..Operation::new(OperationKind::AllReduce, Some(DType::F32), 10)
    };
    let broadcast = Operation {
        root: Some(1),
        ..Operation::new(OperationKind::Broadcast, Some(DType::F32), 10)
    };
    let scatter = Operation {
        kind: OperationKind::ReduceScatter,
        rows: 5,
        ..all_reduce
    };
    let lengths = Operation {
        root: Some(0),
        ..Operation::lengths(
            OperationKind::AllGather,
            OperationKind::GatherVarcount,
            DType::I8,
            1,
        )
    };
    let counts = Operation::new(OperationKind::AllGatherCounts, Some(DType::I8), 1);
    for sound in [
        all_reduce,
        broadcast,
        scatter,
        lengths,
        counts,
        Operation::BARRIER,
    ] {
        assert!(sound.is_sound(2), "{sound}");
    }
    let odd: [(&str, Operation, Change); 13] = [
        ("no operator", all_reduce, |odd| odd.reduce = None),
        ("no type", all_reduce, |odd| odd.dtype = None),
        ("too many", all_reduce, |odd| odd.count = 1 << 60),
        ("sent as a bool", all_reduce, |odd| {
            odd.wire = Some(DType::Bool);
        }),
        ("a root", all_reduce, |odd| odd.root = Some(0)),
        ("no root", broadcast, |odd| odd.root = None),
        ("no such root", broadcast, |odd| odd.root = Some(2)),
        ("an operator", broadcast, |odd| {
            odd.reduce = Some(ReduceOp::Sum);
        }),
        ("rows", scatter, |odd| odd.rows = 3),
        ("no rows", scatter, |odd| odd.rows = 0),
        ("lengths of another type", lengths, |odd| {
            odd.dtype = Some(DType::U8);
        }),
        ("two lengths", lengths, |odd| odd.count = 2),
        ("too many counts", counts, |odd| odd.count = 1 << 16),
    ];
    for (what, mut odd, change) in odd {
        change(&mut odd);
        assert!(!odd.is_sound(2), "{what}: {odd}");
    }
}
